"""What a node or a router tells Prometheus.

Guarantees: what is held (pages, leases, peers) is asked of the node when somebody scrapes, in its own loop; what took
time is observed once a request, when it ends; nothing is done a page. Names are in `names.py` and nowhere else.
"""
