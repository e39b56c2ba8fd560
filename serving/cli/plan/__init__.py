"""`weft plan`: layouts, speed and price for a model on given machines.

command.py     the command's flags, and a plan from beginning to end
simulated.py   latencies from a simulation of the scheduler
report.py      a plan as a table, JSON, Helm values or formulas
plot.py        a plan as a picture
why.py         the decisions that weft makes for a layout
calibrate.py   constants from a server's log of its steps

The model of cost is in models/plan.
"""
