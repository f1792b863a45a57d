"""``evenstep verify``: the same training at several world sizes, compared step by step."""
