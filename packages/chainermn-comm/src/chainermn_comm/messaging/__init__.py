"""Messages of any arrays and objects between ranks, and the handshake before collective calls."""
