"""The contract between the services: events, requests, subjects. Nothing here does I/O.

An event is a frozen msgspec struct whose JSON begins with `type` (`traj.call.v1`). Fields are only ever added, with
defaults; a breaking change is a new version of the type, and an upcaster turns the old one into today's struct
(`opengyre.proto.codec`). Identifiers are tokens of `[A-Za-z0-9_-]`, so that each is one token of a NATS subject.
"""
