"""`weft bench`: load an OpenAI-compatible server as users do, and report the latency they see.

command.py     the command's flags
run.py         a benchmark: from flags to runs, and to the files that the flags ask for
workload.py    what is asked, and when
client.py      make requests, and measure them
report.py      turn times into figures, and figures into a table, JSON and a plot
"""
