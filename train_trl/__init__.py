"""Trains with TRL's SFTTrainer: recipes, arguments, data sets, callbacks and the built-in data."""
