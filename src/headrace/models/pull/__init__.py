"""`headrace pull`: fetches models. Nothing else of the engine reaches out for one."""
