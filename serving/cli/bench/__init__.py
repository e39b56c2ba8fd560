"""`weft bench`: a load test for OpenAI-compatible servers, with the latency that users see.

command.py     the command's flags
run.py         a benchmark: flags, runs, output files
workload.py    prompts, their lengths, and their arrival times
client.py      HTTP requests and their times
report.py      figures from times, as a table, JSON and a plot
"""
