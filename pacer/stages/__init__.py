"""What a verb builds when it lacks it: corpus → labels → trained part, each in a folder named by what made it."""
