"""Files of logged rollouts, written by their hosts' own functions; see README.md."""
