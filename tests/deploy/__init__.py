"""The chart and the images: rendered by real helm, checked against Kubernetes' schemas and against the program."""
