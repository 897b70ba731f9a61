"""Answers by generation and scores them: built-in held-out questions and the public benchmarks."""
