"""Pipeline parallelism over axis `pipe`: a schedule is a table, and one program runs any table.

`schedule.py` says what a table is and checks it, `builders.py` makes the published ones,
`tables.py` reads and writes them as CSV, `stash.py` says where values wait, `simulate.py` what a
table costs, `drawing.py` draws it. Nothing in these files needs JAX.
"""
