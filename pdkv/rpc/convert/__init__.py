"""The only place that turns node/messages.py into protobuf and back.

Guarantees: every function named `*_from_pb` checks all that a peer sent (lengths of columns against each other, sizes,
ids, finite positive durations, known words) and raises `ProtocolError` or `BoundsError` naming the field; what it
returns needs no second look, except at things that only the node knows (its pool, its leases, its own chain).
"""
