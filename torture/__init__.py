"""What a run must survive: kills, failing disks, damaged files, little memory, and attacks.

python -m torture [--kills N] [--seed N] [--only kill disk damage memory]

training.py   the small training that is disturbed, and the bits it must end with
faults.c      makes the n-th write below a folder fail, or kills the process at it
faults.py     the real command with such a fault
kill.py disk.py damage.py memory.py   the campaigns, a table each
"""
