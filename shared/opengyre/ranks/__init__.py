"""A cell of several processes: ranks under one supervisor, torch.distributed among them, FSDP2 for what they hold.

Importing the package imports no torch; `crew` needs none in the supervisor.
"""
