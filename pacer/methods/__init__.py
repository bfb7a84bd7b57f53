"""From the name of a method to a decoder: an arm's words, its rules, its drafter."""
