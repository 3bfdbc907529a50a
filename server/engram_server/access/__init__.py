"""Authentication, scopes and rate limits: API keys, OpenID Connect tokens, quotas."""
