"""How minutes are asked for and summed up; every third text is for validation.

The values in braces are those of `phrases.py`; `old` is a decision that no longer stands, `oldcon`
what spoke against it, and `other` a proposal that was not taken.
"""

INSTRUCTIONS = (
    "Summarise the meeting. Then list the decisions that stand at its end, and the action items"
    " with owner, task and due date.",
    "Write the minutes of this meeting: a short summary, the decisions, and who does what by when.",
    "Please turn this transcript into a summary with the decisions and action items. Leave out"
    " what was withdrawn or changed later.",
    "What was discussed and decided here, and who has to do what by when?",
    "I missed this meeting. Give me a summary, the final decisions and the action items.",
    "Give me the essence of this conversation, what was agreed in the end, and the open tasks with"
    " their owners and dates.",
)
ABOUT = (
    "The meeting was about {topics}.",
    "The group discussed {topics}.",
    "The subjects were {topics}.",
    "Those present talked about {topics}.",
    "On the agenda: {topics}.",
    "The participants dealt with {topics}.",
)
SUM_DECIDED = (
    "Because {background}, the group decided to {do}: {pro}.",
    "On {topic}: {background}. It was decided to {do}, because {pro}.",
    "{Background}. The group will {do}, because {pro}.",
    "Concerning {topic}, the outcome is to {do}; {pro}.",
    "As {background}, it was agreed to {do}.",
    "As for {topic}, the group chose to {do}, since {pro}.",
)
SUM_CONTESTED = (
    "Because {background}, the group decided to {do}, although {con}.",
    "On {topic}: {background}. Opinions differed, but in the end it was decided to {do}.",
    "{Background}. One idea was to {other}, but the group will {do}, because {pro}.",
    "Concerning {topic}, some wanted to {other}. The outcome is to {do}; {pro}.",
    "As {background}, it was agreed to {do} despite the objection that {con}.",
    "As for {topic}, the group preferred to {do} over the proposal to {other}.",
)
SUM_REVISED = (
    "On {topic}: the group first decided to {old}, but because {oldcon} it changed this and"
    " will {do}.",
    "{Background}. The first decision, to {old}, was replaced: the group will {do}.",
    "Concerning {topic}, the decision to {old} did not last, as {oldcon}. The outcome is to {do}.",
    "As for {topic}, a decision to {old} was revised later in favour of the plan to {do}.",
    "Because {background}, the group wanted to {old}, then changed its mind and will {do}.",
    "As {background}, it was at first agreed to {old}; in the end it was agreed to {do}.",
)
SUM_REVOKED = (
    "On {topic}: a decision to {old} was taken and then withdrawn, because {oldcon}.",
    "{Background}. The group decided to {old} but took that back, so the question is open.",
    "Concerning {topic}, the decision to {old} was revoked and nothing is decided.",
)
SUM_OPEN = (
    "On {topic}: {background}. No decision was taken.",
    "{Background}. The group weighed several ways and left the question open.",
    "As for {topic}, the decision was put off to the next meeting.",
)
