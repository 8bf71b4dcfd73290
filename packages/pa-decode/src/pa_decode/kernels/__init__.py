"""Device code, found by the name of its spec and loaded on first use; nothing else imports it."""
