"""Clients on this machine: receives descriptors of their memory over a Unix socket, hands on products in place.

Not HTTP: packets of `service.local.messages` on a SOCK_SEQPACKET socket of mode 0600. Operands and D stay in the
client's own memory, which the worker maps; no byte of them crosses a socket.
"""
