"""The published schedules, as tables.

Each can be built in two forms. *One action per slot* is how papers draw it. *Phased*, with a
forward and then a backward in each slot, costs no more than the ideal in one lock-step program.
"""
