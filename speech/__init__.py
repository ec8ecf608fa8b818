import common as common  # first: says in one line which packages are missing
