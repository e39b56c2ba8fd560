"""The parts of benchmarks/plan.py."""
