"""The daemon of an edge device: enrolment, training when it may, inference, and what to do when something is wrong."""
