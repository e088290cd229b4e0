"""Tasks of other libraries: each module makes the tasks of one library a `Task`; see `registry.PREFIXES`."""
