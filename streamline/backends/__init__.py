"""Where workers run. A backend opens workers and hands back their inboxes; whatever it is, the items are the same."""
