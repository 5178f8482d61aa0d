"""Run checks that may take too long in processes with limits of CPU time and memory."""
