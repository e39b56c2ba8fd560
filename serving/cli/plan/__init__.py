"""`weft plan`: which layout of which machine serves a model, how fast, and at which price.

command.py     the command's flags, and a plan from beginning to end
report.py      a plan as a table, JSON, Helm values or formulas
plot.py        a plan as a picture
calibrate.py   constants from a server's log of its steps

The model of cost is in models/plan.
"""
