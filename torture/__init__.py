"""What a run must survive: a kill anywhere, a disk that fails, files that rot, short memory.

python -m torture [--kills N] [--seed N] [--only kill disk damage memory]

training.py   the small training that suffers, and its bits
faults.c      makes the n-th write below a folder fail, or kills the process at it
faults.py     the real command with such a fault
kill.py disk.py damage.py memory.py   the campaigns, a table each
"""
