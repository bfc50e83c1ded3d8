"""What people say in any meeting, by what they do with it; every third phrase is for validation.

Values in braces: `topic` is a noun phrase, `do` and `task` are infinitives without `to`, `pro` and
`con` clauses; a name with a capital, as `Pro`, is the same at the start of a sentence.
"""

OPEN = (
    "Right, shall we start? On the list: {topics}.",
    "Good morning, everybody. We've got {topics} today.",
    "Hello, thanks for coming. Today it's {topics}, and then we can all go home.",
    "I think we're complete. I'd like to get through {topics}.",
    "Let's begin, it's already five past. I have {topics} on the agenda.",
    "Welcome. The agenda has {topics}; has anybody got something to add? No? Good.",
    "Okay, I'm recording, I hope that's fine. We'll talk about {topics}.",
    "Can everybody hear me? Good. So, {topics}, in that order.",
    "Everybody has coffee? Then here's the plan: {topics}.",
    "Thanks for being on time. I've written down {topics}.",
    "Let's try to be done within the hour. We have {topics}.",
    "Who writes the minutes? Thank you. The subjects are {topics}.",
)
FIRST = (
    "{name}, would you begin?",
    "Let's hear {name} first.",
    "{name}, you've looked into it, so please.",
    "{name}, may I ask you to start?",
    "The first word goes to {name}.",
    "Off we go. {name}, what do we know?",
)
NEXT = (
    "Next: {topic}. {name}, that's yours.",
    "Let's move on to {topic}. {name}?",
    "Then there's {topic}. {name}, would you tell us where we are?",
    "{name}, you wanted to talk about {topic}.",
    "All right, {topic}. Who knows more? {name}, I think.",
    "On to {topic}, please. {name} has looked into it.",
    "The next point is {topic}. Go ahead, {name}.",
    "So, {topic}. {name}, what's happened?",
    "I'd like to take {topic} now. {name}, please.",
    "Now for {topic}, which I know some of you came for. {name}?",
    "Good. {name}, bring us up to date on {topic}.",
    "That brings us to {topic}. The floor is yours, {name}.",
)
PROPOSE = (
    "I'd say we {do}. {Pro}.",
    "What if we {do}? {Pro}.",
    "My suggestion would be to {do}, because {pro}.",
    "Couldn't we {do}? {Pro}, after all.",
    "The simplest thing is to {do}. {Pro}.",
    "I've thought about it, and I'd {do}. {Pro}.",
    "Why don't we {do}? {Pro}, if you think about it.",
    "For me it's clear: {do}. {Pro}.",
    "One way would be to {do}. The good thing is that {pro}.",
    "Let me throw something in: we {do}. {Pro}.",
    "If you ask me, we should {do}, since {pro}.",
    "There's always the possibility to {do}. {Pro}, don't forget.",
)
COUNTER = (
    "I'd rather {do}, to be honest. {Pro}.",
    "Or we {do}. {Pro}.",
    "There's another way, though: {do}. {Pro}.",
    "May I argue the opposite? Let's {do}, because {pro}.",
    "Before we settle on that, we could also {do}. {Pro}.",
    "I had something else in mind, namely to {do}. {Pro}.",
    "And if we {do} instead? {Pro}.",
    "Let me make the case for something different. If we {do}, {pro}.",
    "I'd turn it around and {do}. {Pro}.",
)
OBJECT = (
    "The trouble is that {con}.",
    "But {con}.",
    "I like it, only {con}.",
    "{Con}, though. Somebody has to say it.",
    "Careful, {con}.",
    "That sounds fine until you remember that {con}.",
    "My worry is that {con}.",
    "Hm. {Con}.",
    "You're forgetting one thing: {con}.",
    "In principle yes, but {con}.",
    "I'm not convinced. {Con}.",
    "I'd go along with it, except that {con}.",
)
DEFEND = (
    "I know. I still think it's the better of two bad choices.",
    "That's true, and we'd have to live with it.",
    "Fair point. I wouldn't let it stop us, though.",
    "Granted. But nothing we've heard so far is free.",
    "We'd manage, we've managed worse.",
    "I'd take that risk.",
    "Yes, well, no solution is perfect.",
    "You're right about that, and I have no answer to it.",
    "It worries me as well, only a bit less than doing nothing.",
)
FAVOUR = (
    "I'm for what {name} said. Let's {do}.",
    "For me it's {name}'s idea, to {do}.",
    "I'd {do}, like {name}.",
    "Having heard all that, I'm with {name}: {do}.",
    "{name} has convinced me. We should {do}.",
    "Then I find {name}'s way better, that is, to {do}.",
    "If I have to choose, I'd rather {do}. {name} is right there.",
    "{name}'s proposal hurts least. So we'd {do}.",
    "I lean towards {name}: {do}.",
)
AGREE = (
    "Makes sense to me.",
    "I could live with that.",
    "Yes, I'm with you.",
    "Agreed.",
    "Sounds reasonable.",
    "I'd support that.",
    "That was going to be my suggestion as well.",
    "Fine with me.",
    "I don't mind, honestly, as long as we decide something.",
    "Good idea, actually.",
    "Nothing against it from my side.",
    "Count me in.",
)
NOD = (
    "Mm-hm.", "Right.", "Okay.", "I see.", "Yes.", "Oh dear.", "Really?", "Good to know.",
    "I didn't know that.", "Ah.", "That explains a lot.", "Same as last year, then.",
)  # fmt: skip
DECIDE = (
    "All right, then we {do}. Any objections?",
    "I hear more yes than no, so let's {do}.",
    "Then that's settled: we {do}.",
    "Good, I'll put it in the minutes: we {do}.",
    "So we {do}. Is everybody on board?",
    "Let's stop here and decide. We {do}.",
    "Let me cut this short: we {do}, and we look at it again if it goes wrong.",
    "I think we've got there. We {do}.",
    "If nobody shouts now, we {do}.",
    "Decided, then. We {do}.",
    "We've gone round this twice. I propose that we {do} and leave it at that.",
    "Then we're agreed that we {do}.",
)
VOTE = (
    "Show of hands for the idea to {do}? That's {yes}. Against? {No}. So we {do}.",
    "I'd like to vote on it. Who wants to {do}? {Yes}. Who doesn't? {No}. Then we {do}.",
    "Hands up, please, who'd {do}? I count {yes} to {no}. We {do}.",
)
POSTPONE = (
    "I don't think we can decide this today. Let's take {topic} up again next time.",
    "We don't know enough yet. I'd leave {topic} open until the next meeting.",
    "Let's sleep on it. No decision about {topic} for now.",
    "We're not getting any further here. {Topic}: that goes to the next agenda.",
    "I'd rather not force it. We come back to {topic} when we know more.",
    "Then we park {topic} for today.",
)
ASSIGN = (
    "{name}, can you {task} by {due}?",
    "{name}, would you {task}? By {due}, if possible.",
    "Somebody needs to {task}. {name}, can I put your name there, by {due}?",
    "I'd need you, {name}, to {task} by {due}.",
    "{name}, may I ask you to {task}? It should be done by {due}.",
    "And {name}, please {task} by {due}.",
)
ACCEPT = (
    "Yes, that works.",
    "Will do.",
    "Sure, no problem.",
    "I'm writing it down.",
    "Yes, I'll see to it.",
    "Of course.",
    "Consider it done.",
    "Okay, it's on my list.",
    "I can do that.",
)
WHO = (
    "Who can {task}?",
    "We also need someone to {task}.",
    "That leaves one thing: who's going to {task}?",
    "Is there a volunteer to {task}?",
    "Then someone has to {task}.",
    "Who'd like to {task}?",
)
TAKE = (
    "I'll do that, by {due}.",
    "Me. Give me until {due}.",
    "I can take that on. You'll have it by {due}.",
    "Leave it with me, say, by {due}.",
    "That's me, I suppose. By {due}?",
    "I have time for it before {due}, so yes.",
)
OFFER = (
    "I'll {task} by {due}.",
    "I can {task}, you'll have it by {due}.",
    "Let me {task}. By {due} should be all right.",
    "I'd be happy to {task}, by {due} if that's soon enough.",
    "I'll {task}, I can manage it by {due}.",
    "Put my name down: I'll {task} by {due}.",
)
OFFER_UNDATED = (
    "I'll {task}. I can't say when, but I'll do it.",
    "Let me {task}, there's no hurry with it, is there?",
    "I'll {task} when I get round to it.",
)
HAGGLE = (
    "Not by {due}, I'm afraid. Would {later} do?",
    "{Due} is too tight for me. Can it be {later}?",
    "Make it {later}, then yes. {Due} I won't manage.",
    "I'm drowning at the moment, so not by {due}. By {later} I can.",
    "Could I have until {later}? {Due} is full already.",
    "Rather {later} than {due}, if that's all right.",
)
GRANT = (
    "{Later} is fine.",
    "All right, {later} then.",
    "Okay, by {later}.",
    "Let's say {later}.",
    "{Later} is early enough.",
    "Then it's {later}.",
)
DECLINE = (
    "I can't, I'm away that week. Maybe {other} could?",
    "Not me, please, I did it last time. What about {other}?",
    "I'd only slow it down. {other} knows more about it.",
    "Sorry, my week's full to the brim. {other}, would you?",
    "I don't think I'm the right one for that. {other}?",
    "Could {other} do it? I've got two of these already.",
)
RETURN = (
    "Can I go back to {topic} for a moment? I keep thinking about it: {con}.",
    "Sorry to reopen this, but about {topic}: {con}. I don't think we took that seriously enough.",
    "I've just had a message about {topic}. It turns out it's worse than we thought: {con}.",
    "One word on {topic} again. We can't ignore that {con}.",
    "Before we finish, I keep worrying about {topic}, because {con}.",
    "I've to come back to {topic}. While we were talking I did the sums, and {con}.",
)
RETHINK = (
    "Then we'd better {do} after all. {Pro}.",
    "In that case I'd {do} instead. {Pro}.",
    "So let's change it and {do}. {Pro}.",
    "So I'd change it: {do}. {Pro}.",
    "Then the other way is the better one: {do}. {Pro}.",
    "If that's so, then rather {do}, because {pro}.",
)
CHANGE = (
    "All right, I'm striking the first decision. We {do} instead.",
    "Then the earlier decision is off the table and we {do}.",
    "Fine, we change our minds: we {do}. Please correct the minutes.",
    "Does anybody insist on the first version? No. Then we {do}.",
    "Okay, new decision: we {do}.",
    "Good that you said it. So it's not what we said before, we {do}.",
)
REVOKE = (
    "You're right, we decided that too fast. I take the decision about {topic} back, it"
    " stays open.",
    "Then let's withdraw what we decided about {topic} and talk about it next time.",
    "Okay, no decision on {topic} after all. We need to know more first.",
    "Hm, then I'd rather undo that. We leave {topic} undecided for now.",
    "Then forget what we decided there. We put {topic} back on the list for next time.",
    "In that case the decision about {topic} doesn't stand. We start again next week.",
)
DROP = (
    "And {name}, you don't have to {task} any more.",
    "That means nobody has to {task} now. {name}, cross it out, please.",
    "{name}, forget about what I asked you: no need to {task}.",
    "So {name} doesn't need to {task}, that's gone.",
    "Then it makes no sense to {task}. {name}, you can drop it.",
    "Which also means that {name} needn't {task}.",
)
PASS_ON = (
    "I said I'd {task}, but I've just looked at my calendar. {other}, could you take it over?",
    "It won't work for me to {task}, sorry. Can {other} do it instead?",
    "Could somebody else {task}? I promised too much there. {other}, maybe?",
)
TAKE_OVER = (
    "Sure, I'll take it over.",
    "Okay, give it to me.",
    "Yes, I'll do it instead.",
    "If it stays at that, yes.",
    "All right, it's mine now.",
    "Fine, I'll do it.",
)
DELAY = (
    "You have me down to {task} by {due}. Can I have until {later}?",
    "I was going to {task} by {due}. It'll be {later}, I'm sorry.",
    "I'm supposed to {task} by {due}, and I already know that I won't. By {later}, is that"
    " all right?",
)
RECAP = (
    "Let me go through the list once more. {items}",
    "So that we all mean the same: {items}",
    "Quickly, who does what: {items}",
)
CLOSE = (
    "That's it, then. Thank you, all of you.",
    "Good, we're through. See you next time.",
    "Anything else? No? Then enjoy the rest of the day.",
    "I think that's all. Thanks, and get home safely.",
    "We're done, and even on time. Thank you.",
    "That was the last point. Bye, everybody.",
    "I'll send the minutes round. Thanks.",
    "Then I close the meeting. Who's coming for lunch?",
    "Right, that's everything. Thanks for your patience.",
)
