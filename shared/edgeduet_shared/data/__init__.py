"""Images, who holds them, and in which order they are learnt.

``sources`` reads images into a table, ``stream`` cuts it into ordered tasks, ``partition`` gives
the training images of each task to clients, ``split`` puts the three together into one saved and
hashed value, ``features`` encodes what no trained parameter can change once and for all.
"""
