def explanations():
    return "## X"
