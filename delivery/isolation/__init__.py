"""Attempts of copies that may have killed their workers, in processes that may die of it.

A worker that dies takes with it everything it had in hand, and all of that is claimed again; who was to blame nobody
saw. A copy that was lost so several times running is attempted in a ward: a process beside the worker, which attempts
many such copies side by side. If the ward dies, each of those is attempted in a cell, which has one at a time. Only a
copy that kills its cell again and again is guilty, and is given up; that the worker dies proves nothing against anybody.
"""
