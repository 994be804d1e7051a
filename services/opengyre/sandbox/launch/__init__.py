"""The launcher: a small process of its own, standard library only, that starts sandboxes and commands.

The service has threads and a large heap, so a fork of it is slow and unsafe; the launcher has neither. It serves one
packet a request on a socket pair and forks a child for each, which does the work, answers and ends. Whatever it
starts lives in a session of its own and outlives both the launcher and the service.
"""
