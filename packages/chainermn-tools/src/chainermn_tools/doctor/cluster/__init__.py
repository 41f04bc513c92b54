"""How the doctor asks hosts: a session by ssh with an agent on each, and what they answered."""
