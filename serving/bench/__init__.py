"""`weft bench`: loads an OpenAI-compatible server the way users do, and reports what they feel.

workload.py says what is asked, load.py when, client.py asks and takes the
times, report.py turns the times into numbers and pictures.
"""
