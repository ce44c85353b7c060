"""`pdkv bench`: measurements between two nodes, over the code that serves."""
