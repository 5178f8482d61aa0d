"""Keep operational events until maintenance turns them into messages.

module      table                                        content
outbox      operational_outbox, operational_overflow     events, written with what they are about
batches     operational_pace                             messages made of them, at a limited rate
completion  operational_messages                         messages whose completion is awaited
"""
