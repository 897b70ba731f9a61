"""Turns a trained model into a self-contained Hub folder and checks it."""
