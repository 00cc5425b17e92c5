"""Copying: the fetch loops of followers, and the proposals that change who is in sync."""
