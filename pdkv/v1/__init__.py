"""Generated from proto/pdkv/v1 by tools/make_proto.py; never edited. Only pdkv.rpc imports it."""
