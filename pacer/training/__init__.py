"""Lightning modules, one per trained part, and the one way they are fitted."""
