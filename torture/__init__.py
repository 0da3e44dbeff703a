"""What must survive: kills, failing disks, damaged and forged runs, hostile requests and pictures.

training.py commands.py faults.c   the small training, and the real command with a fault in it
kill disk damage runs together     a run that is killed, cut off, changed, forged, written by two
page bombs                         requests and pictures against the page
databases kill_index               an index in a database whose writer is killed
fuzz                               the properties of tests/ with a thousand examples each

`python -m torture` runs all of it.
"""
