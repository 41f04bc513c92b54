"""What tests share, each once: jobs, models, doubles, hosts, and what a test must do."""
