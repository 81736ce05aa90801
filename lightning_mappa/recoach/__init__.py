"""Another coach, rubric or credit over what a run has recorded: how would verdicts and updates have differed?"""
