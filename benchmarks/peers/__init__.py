"""What vs_peers.py is made of, in the order it is used.

checkpoint.py says what a model weighs, contestants.py who races and how each is
started, process.py starts them, loads.py asks them, limits.py measures the
machine, table.py and report.py turn the samples into goals, tables and pictures.
"""
