"""The model: everything in this room, and nothing else, ships to the Hub."""
