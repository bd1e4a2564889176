run = None
