"""Predictions from shapes alone: nothing here traces, compiles or runs."""
