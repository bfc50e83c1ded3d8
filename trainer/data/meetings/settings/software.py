"""A team that makes a software product."""

from trainer.data.meetings.issue import Issue, MeetingSetting, Option

SOFTWARE = MeetingSetting(
    "software",
    (
        "Product sync",
        "Planning for the next release",
        "Engineering weekly",
        "Release meeting",
        "Iteration review",
        "Team meeting, mobile app",
    ),
    (
        "engineering lead",
        "designer",
        "product manager",
        "tester",
        "support lead",
        "backend developer",
    ),
    (
        Issue(
            "the date of the release",
            "the export still loses attachments in one case out of {rate}",
            "So, the export. It's better, but it still drops an attachment in about one case out of"
            " {rate}. I can reproduce it, I just don't know yet why it happens.",
            (
                (
                    "Would a customer notice?",
                    "Yes. They'd open the archive and a file would be missing.",
                ),
                (
                    "How far are you from the cause?",
                    "I've narrowed it down to the upload queue. It might be a day, it might"
                    " be a week.",
                ),
            ),
            (
                Option(
                    "release on Thursday without the export",
                    "everything else is tested and three customers wait for the new login",
                    "the export is on the cover of the announcement",
                    ("hide the export behind a switch", "take the export out of the announcement"),
                ),
                Option(
                    "move the release back by a week",
                    "one complete release is easier to explain than two halves",
                    "the sales team has promised the date to {customers} customers",
                    ("tell the sales team about the new date",),
                ),
                Option(
                    "release to the test group only",
                    "the test group knows that things can break",
                    "it does not help the customers who wait for the login",
                    ("enable the build for the test group",),
                ),
            ),
            ("write down how to reproduce the lost attachment",),
            {"rate": (40, 200, 20), "customers": (5, 15, 1)},
        ),
        Issue(
            "the slow search",
            "a search takes {seconds} seconds for the largest customer",
            "Our biggest customer now has so many documents that a search takes {seconds} seconds."
            " They've been polite so far, but they did send a screen recording.",
            (
                (
                    "Is it the database or the app?",
                    "The database. The same query is fast as soon as I leave out the permissions.",
                ),
                ("Since when?", "It's crept up since autumn, it's not one change."),
            ),
            (
                Option(
                    "add an index for the permissions",
                    "it is a small change and can be measured today",
                    "every write gets a little slower",
                    ("measure the index on a copy of the customer's data",),
                ),
                Option(
                    "move search to a service of its own",
                    "it will be needed anyway once more customers are that large",
                    "the team would operate one more thing at night",
                    (
                        "sketch the search service on two pages",
                        "estimate what the search service costs a month",
                    ),
                ),
                Option(
                    "limit the search to the last two years by default",
                    "most people look for recent documents",
                    "lawyers search for old ones above all",
                    ("add a filter for older documents to the search page",),
                ),
            ),
            ("answer the customer about the search",),
            {"seconds": (6, 19, 1)},
        ),
        Issue(
            "the on-call rota",
            "the same two people have taken every night shift since January",
            "I looked at the rota and it's always the same two names at night. One of them has told"
            " me, quite calmly, that this can't go on.",
            (
                (
                    "How often does it actually ring?",
                    "{calls} times last month, and half of those were the certificate alarm.",
                ),
                (
                    "Can't we mute that alarm?",
                    "We could, if somebody makes sure that certificates renew themselves.",
                ),
            ),
            (
                Option(
                    "include everybody who deploys in the night rota",
                    "whoever ships it should also hear it ring",
                    "three people have never touched the database",
                    ("write a runbook for the database", "draw up the new rota"),
                ),
                Option(
                    "pay an outside team for the nights",
                    "everybody sleeps",
                    "it costs {fee} euros a month and they do not know the product",
                    ("get a contract offer for night cover",),
                ),
                Option(
                    "drop night cover for all but the payment service",
                    "nothing else has ever needed an answer before eight",
                    "the contract with one customer says around the clock",
                    ("check which contracts mention nights",),
                ),
            ),
            ("make the certificates renew automatically",),
            {"calls": (9, 30, 1), "fee": (1800, 4200, 200)},
        ),
        Issue(
            "the sign-up page",
            "four in ten visitors leave at the field for the company's tax number",
            "I watched recordings of {sessions} sign-ups. Four in ten people stop at the tax"
            " number."
            " One of them googled what it is and then went away for good.",
            (
                (
                    "Do we need the number at that point?",
                    "Billing needs it for the first invoice, so thirty days later.",
                ),
                ("Is it worse on phones?", "Much worse, the field doesn't bring up the digits."),
            ),
            (
                Option(
                    "ask for the tax number with the first invoice",
                    "nobody needs it before",
                    "accounting will have to chase people for it",
                    (
                        "remove the tax number from the sign-up page",
                        "add the tax number to the billing settings",
                    ),
                ),
                Option(
                    "explain the field in one sentence",
                    "it is an afternoon's work",
                    "people do not read sentences next to fields",
                    ("write a help text for the tax number",),
                ),
                Option(
                    "run both versions for a fortnight",
                    "then the numbers decide instead of the loudest voice",
                    "a fortnight brings only about {visitors} visitors to the page",
                    ("set up the comparison of the two pages",),
                ),
            ),
            ("show the recordings to accounting",),
            {"sessions": (20, 60, 5), "visitors": (300, 900, 100)},
        ),
        Issue(
            "support for the old desktop client",
            "the old client is down to {share} percent of the users",
            "The old desktop client: we're at {share} percent of users, and it caused a quarter of"
            " the tickets last month. Every change to the server gets tested twice because of it.",
            (
                (
                    "Who are these users?",
                    "Mostly two public offices that can't install anything themselves.",
                ),
                ("What do they miss in the browser?", "Printing to a tray. That's really all."),
            ),
            (
                Option(
                    "end the old client in December",
                    "half a year is a fair warning",
                    "one of the offices cannot update before its own audit in spring",
                    ("announce the end of the old client", "call both offices in person"),
                ),
                Option(
                    "freeze the old client and only fix security problems",
                    "it takes the pressure off without hurting anybody",
                    "a frozen client never goes away",
                    ("write down what frozen means",),
                ),
                Option(
                    "build tray printing into the browser version first",
                    "it removes the only real reason to stay",
                    "it takes a developer about {weeks} weeks",
                    ("estimate tray printing properly",),
                ),
            ),
            ("count the tickets of the old client by cause",),
            {"share": (2, 7, 1), "weeks": (3, 7, 1)},
        ),
        Issue(
            "the backup that nobody has restored",
            "no backup has been restored since the move to the new hosting",
            "An auditor asked me when we last restored a backup. I said I'd look it up. I have"
            " looked it up, and the honest answer is: never, since we moved hosting.",
            (
                (
                    "But the backups run?",
                    "Every night, {size} gigabytes. They run. I can't say more.",
                ),
                ("When does the auditor come back?", "In six weeks."),
            ),
            (
                Option(
                    "restore the whole database into a test environment every month",
                    "it is the only proof that counts",
                    "the test environment is too small for it today",
                    ("enlarge the test environment", "script the restore"),
                ),
                Option(
                    "restore a few random tables each week",
                    "it runs on what is already there",
                    "it does not show whether the whole comes back",
                    ("write the weekly check of random tables",),
                ),
                Option(
                    "buy managed backups with a restore guarantee",
                    "somebody else is then responsible in writing",
                    "the price is {price} euros a year",
                    ("compare two managed backup services",),
                ),
            ),
            ("tell the auditor what was decided",),
            {"size": (120, 900, 20), "price": (2400, 7200, 300)},
        ),
    ),
)
