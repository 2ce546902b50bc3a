"""How every part reads its settings: a YAML file under the environment, into frozen models that refuse what they do not
know and say why in a sentence; and what every part asks of its listeners and certificates."""
