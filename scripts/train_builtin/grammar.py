"""A grammar of short children's stories: the built-in model's only training text.

A story is drawn in two steps. First its cast and props are fixed (who, where, which object, which problem), then a
plot template is expanded around them, so a name, a pronoun or an object cannot change between the first sentence and
the last. Templates are plain text with three marks:

    [a|b|c]   one of the alternatives, which can nest; `[a|]` is an optional part
    <rule>    a template from RULES
    {slot}    a word or phrase fixed in the first step

`python grammar.py 5` prints five stories.
"""

import random
import re
import sys
from math import log2

# Friends have separate names: a model this small does not learn from "differs from the hero's" alone, and would use
# one name for both.
HERO_NAMES = {
    "she": "Lily Mia Anna Emma Nora Ella Rosa Zoe Lucy Ruby".split(),
    "he": "Tom Ben Max Sam Leo Finn Jack Noah Oscar Paul".split(),
}
FRIEND_NAMES = {
    "she": "Clara Ivy Alice Maya Lena Sara Molly Daisy Luna Tina".split(),
    "he": "Hugo Eli Adam Theo Jim Luke Otto Ravi Felix Timo".split(),
}
ANIMALS = """fox rabbit bear cat dog mouse duck frog hedgehog squirrel owl turtle pig lamb goat pony penguin elephant lion
monkey dragon robot giraffe otter beaver deer panda wolf hen kitten puppy bunny""".split()
TRAITS = """little small kind brave clever happy shy curious young cheerful gentle funny quiet silly friendly
smart sweet""".split()
COLORS = "red blue green yellow purple orange pink golden silver white brown black".split()
OBJECTS = """ball kite doll hat scarf drum book bell whistle umbrella lantern basket ring key shell button blanket flute
wagon ribbon teddy_bear toy_boat toy_car toy_train music_box coat cup crown balloon pillow""".split()
BREAKABLE = "kite drum wagon toy_boat toy_car toy_train music_box chair lantern basket doll flute".split()
FLYING = "ball kite balloon hat scarf ribbon".split()
HOMES = """in_a_small_village in_a_quiet_town in_a_big_city in_a_green_valley in_a_deep_forest in_a_little_house_by_the_sea
on_a_farm on_a_tiny_island in_an_old_castle near_a_blue_lake at_the_edge_of_the_woods in_a_cozy_cottage on_a_high_hill
next_to_a_wide_river in_a_land_far_away in_a_small_house""".split()
PLACES = "park garden forest beach river lake meadow hill market farm field playground pond orchard woods".split()
# Plots with "in the {place}" choose among these.
INSIDE_PLACES = "park garden forest meadow field orchard woods".split()
INSIDE_PLOTS = "lost_object lost_baby lost_way garden rescue wish".split()
WEATHER = {
    "sunny": ("The sun was shining.", "The sky was blue.", "The grass was green."),
    "warm": ("The birds were singing.", "A soft wind was blowing.", "The sun was high in the sky."),
    "cloudy": ("White clouds were in the sky.", "The air was fresh and cool."),
    "windy": ("The leaves were dancing in the wind.", "The wind blew through the trees."),
    "rainy": ("Small drops fell from the sky.", "The ground was wet.", "The air smelled of rain."),
    "cold": ("The air was cold and clear.", "A cold wind was blowing."),
    "bright": ("The sky was blue.", "The birds were singing."),
}
SPOTS = """under_a_pile_of_leaves in_the_tall_grass behind_a_big_rock under_a_wooden_bench behind_an_old_tree
next_to_a_little_bush in_a_hole_in_the_ground under_a_bridge between_two_stones in_a_patch_of_flowers""".split()
FRUITS = "apples berries nuts carrots cherries pears plums grapes".split()
FOODS = FRUITS + "cookies pancakes muffins sandwiches".split()
SKILLS = {
    "swim": "swam all the way across the pond",
    "bake bread": "baked a big loaf of bread",
    "whistle": "whistled a happy tune",
    "fish": "caught a silver fish",
    "skate": "skated in a big circle",
    "paint": "painted a picture of the sun",
    "climb": "climbed to the top of the tree",
    "juggle": "juggled three balls",
    "ride a bike": "rode the bike down the road",
    "play the drum": "played the drum for everyone",
    "jump high": "jumped over the fence",
    "write": "wrote a letter to {his} {relative}",
}
FEARS = {
    "the dark": "a little lamp",
    "thunder": "a warm blanket",
    "deep water": "a small boat",
    "high places": "a strong rope",
    "loud noises": "a soft hat",
    "monsters": "a bright light",
    "the cold wind": "a thick coat",
}
BABIES = {
    "bird": "bird", "duckling": "duck", "puppy": "dog", "kitten": "cat", "mouse": "mouse", "bunny": "rabbit", "owl": "owl",
    "squirrel": "squirrel", "hedgehog": "hedgehog", "fox": "fox", "lamb": "sheep", "turtle": "turtle",
}  # fmt: skip
TRAPS = """in_the_mud in_an_old_net in_a_deep_hole under_a_heavy_branch between_two_rocks in_a_thorny_bush
behind_a_closed_gate""".split()
TOOLS = "some_glue a_piece_of_string a_bit_of_tape a_small_hammer some_wood a_needle_and_thread".split()
PULLERS = "a_long_rope a_strong_stick an_old_blanket a_big_spoon a_wooden_ladder".split()
REACHERS = "a_long_stick a_tall_ladder a_big_box a_fishing_net an_old_broom".split()
PLANTS = {
    "sunflower": "as tall as a house",
    "rose": "red and lovely",
    "pumpkin": "round and orange",
    "apple tree": "strong and green",
    "tomato plant": "full of red tomatoes",
    "tulip": "yellow and bright",
    "strawberry plant": "full of sweet strawberries",
}
BUILDS = {
    "a tree house": "sat inside and looked at the stars",
    "a boat": "sailed across the lake",
    "a bridge": "walked over the river",
    "a snowman": "gave it a hat and a carrot nose",
    "a sand castle": "put a small flag on the top",
    "a bird house": "watched the birds move in",
    "a swing": "went up and down all day",
    "a fort": "played inside until the evening",
}
GIFTS = {
    "cake": ("flour", "sugar", "eggs", "milk", "butter"),
    "soup": ("carrots", "onions", "salt", "beans", "water"),
    "picture": ("paint", "paper", "glue"),
    "necklace": ("string", "shells", "beads"),
    "pie": ("apples", "sugar", "flour", "butter", "berries"),
}
RELATIVES = {"mother": "she", "father": "he", "grandma": "she", "grandpa": "he", "sister": "she", "brother": "he"}
PRECIOUS = "vase cup plate lamp mirror clock bowl teapot".split()

RULES = {
    "day": "[morning|day|afternoon]",
    "hobby": """[play outside|sing songs|look at the clouds|tell stories|run in the grass|dance in the rain|count the stars
        |explore new places|make new friends|help others|laugh|draw pictures|collect stones|read books|eat {food}]""",
    "said": "[said|answered|replied]",
    "cried": "[cried|shouted|called]",
    "glad": "[happy|glad|very happy|full of joy|so happy|pleased]",
    "sad": "[sad|very sad|upset|worried|so sad]",
    "feel_sad": """[{H} felt <sad>.|{H} was <sad>.|{H} sat down and began to cry.|A tear ran down {his} face.
        |{H} did not know what to do.|{He} felt like crying.|||]""",
    "ask_why": """["What is wrong[, {H}|]?" asked {F}.|"Why are you [so |]sad?" asked {F}.|{F} asked, "What happened?"
        |"Are you all right?" asked {F}.|"Oh no, what happened?" {F} asked.]""",
    "offer": """["Do not worry," <said> {F}. "[I will help you|I can help you|We can do it together|Let us think]."
        |"I can help," <said> {F}.|{F} [smiled|nodded] and said, "[Let me help you|I have an idea|We will do it together]."
        |"Do not cry," <said> {F}. "I [will help you|have an idea]."]""",
    "beg": """["Can you help me[, {F}|, please|]?" asked {H}.|"Please help me," said {H}.|{H} asked {F} for help.
        |"Will you help me?" {H} asked.]""",
    "thanks": """["Thank you[, {F}| so much|]!" said {H}.|{H} [thanked {F}|gave {F} a big hug|hugged {F}].
        |"You are [a good friend|the best friend|so kind]," {H} said.
        |{H} smiled and said, "Thank you[, {F}| for your help|]!"]""",
    "welcome": """["You are welcome," <said> {F}.|{F} smiled.|"That is what friends are for," <said> {F}.|{F} was <glad> too.
        |"I am glad to help," <said> {F}.||||]""",
    "cheer": """["[Hooray|We did it|Yes|Look]!" <cried> {H}.|{H} [jumped|danced|laughed] with joy.|{H} was <glad>.
        |{H} clapped and laughed.|{He} had a big smile on {his} face.||]""",
    "after": """[After that, {H} and {F} played together [all day|until the sun went down].
        |Then they went home and [ate|shared] some {food}.|They [laughed|sang] all the way home.
        |From that day on, {H} and {F} were [best friends|always together|good friends].
        |That night, {H} [slept well|fell asleep with a smile|dreamed of {F}].||||
        |In the evening, they sat together and [looked at the stars|watched the sunset|told stories].|]""",
    "close": "[The end.||They lived happily ever after.|||And they were happy.|||]",
    "moral": "[{H} learned that|That day, {H} learned that|And so {H} learned that|Now {H} knew that|{H} never forgot that]",
    "friends_moral": """<moral> [good friends help each other|a good friend is a great gift|it is good to ask for help
        |two friends can do more than one|friends make everything better].""",
    "home_line": "[{He} lived {home}.|{He} lived {home} with {his} {relative}.|{His} home was {home}.]",
    "hobby_line": "[{He} loved to <hobby>.|{He} liked to <hobby>.|Every day, {he} liked to <hobby>.]",
    "named": "[named|called|named]",
    "hero_intro": "a {trait} {kind} <named> {H}",
    "opening": """[Once upon a time[,|] there [was|lived] <hero_intro>. [<home_line>|<hobby_line>|]
        |Once upon a time, {home}, there lived <hero_intro>. [<hobby_line>|]
        |Once upon a time, <hero_intro> lived {home}. [<hobby_line>|]
        |There [once was|was once|was] <hero_intro>. [<home_line>|<hobby_line>|]
        |There was <hero_intro> who lived {home}. [<hobby_line>|]
        |{home} [there |]lived <hero_intro>. [<hobby_line>|]
        |{home} there was <hero_intro>. [<hobby_line>|]
        |Long ago, <hero_intro> lived {home}. [<hobby_line>|]
        |A long time ago, there was <hero_intro>. [<home_line>|<hobby_line>]
        |{H} was a {trait} {kind}. [<home_line>|<hobby_line>|]
        |{H} was a {trait} {kind} who lived {home}. [<hobby_line>|]
        |{H}{the_kind} lived {home}. [<hobby_line>|]
        |<hero_intro> lived {home}. [<hobby_line>|]
        |The {trait} {kind} was [named|called] {H}. [<home_line>|<hobby_line>]]""",
    # The same, for a story with the day in its first sentence.
    "opening_day": """[One <day>, <hero_intro> [woke up early|looked out of the window|was at home|had nothing to do]. [{sky}|]
        |One {weather} <day>, <hero_intro> [woke up early|went outside|was at home|felt bored]. [<hobby_line>|]
        |It was a {weather} <day>. <hero_intro> [was at home|looked at the sky|went outside|sat by the door]. [<hobby_line>|]
        |One day, {H}{the_kind} [woke up early|went outside|was at home]. [<home_line>|<hobby_line>|]]""",
    "when": "[One <day>,|One {weather} <day>,|One day,]",
    "friend_before": """{His} [best |]friend was a {ftrait} {fkind} <named> {F}.""",
    # The friend's entry: already known, or a stranger.
    "meet_known": """[Just then, {F} [came by|came along]|Then {his} friend {F} came [by|over]|{F} saw {him} and came over
        |Soon, {F} [came to see {him}|walked by]].""",
    "meet_new": """[Just then, a {ftrait} {fkind} <named> {F} [came by|came along]
        |Then {he} met a {ftrait} {fkind} <named> {F}|A {ftrait} {fkind} <named> {F} saw {him} and came over
        |Soon, a {ftrait} {fkind} <named> {F} walked by].""",
}

# Each plot: a function that draws its own slots, and the template. The opening precedes it.
PLOTS = {
    "lost_object": """
        {H} had a {color} {thing}. [{He} loved the {thing} very much.|It was a gift from {his} {relative}.||] {when} {H} took the {thing} to the {place}. [{sky}|] {He} [played|ran|jumped] and [laughed|sang] [for a
        long time|all day|]. [But then|When it was time to go home], the {color} {thing} was gone. "Where is my {thing}?" <cried> {H}.
        [{He} looked everywhere, but {he} could not find it.|{He} looked left and right, but the {thing} was not there.|]
        <feel_sad> {meet} <ask_why> "[I lost my {color} {thing}|I lost my {thing}|I cannot find my {thing}]," said {H}.
        <offer> They looked [up and down|all over the {place}|here and there]. [They asked a [bird|bee|frog|snail], but it
        had not seen it.|] [At last|Then], {F} looked {spot}. "[Here it is|I found it|Look]!" <cried> {F}. There was the
        {color} {thing}! <cheer> <thanks> <welcome> <after> [<friends_moral>|<moral> it is good to take care of things.] <close>""",
    "stuck_object": """
        {when} {H} went to the {place} with {his} {color} {thing}. [{sky}|] {H} [threw the {thing} up high|tossed the {thing}
        into the air|held the {thing} in {his} hand]. [Suddenly|Then], a strong wind came, and the {thing} flew [up, up, up|high
        into the air]. It got stuck in a tall tree. "Oh no, my {thing}!" <cried> {H}. {He} [jumped and jumped|tried to
        climb the tree|shook the tree], but [the {thing} was too high|it did not come down|{he} could not reach it].
        <feel_sad> {meet} <ask_why> "My {thing} is stuck in the tree," said {H}. <offer> {F} [ran home and came back
        with|went away and came back with|found] {reacher}. [{H} held it, and {F} reached up.|They used {the_reacher} together.]
        [One, two, three!|] The {color} {thing} [fell down|came down] [softly |]to the ground. <cheer> <thanks> <welcome>
        <after> [<friends_moral>|<moral> there is always a way.] <close>""",
    "broken_object": """
        {H} had a {color} {thing}. [{He} played with it every day.|{He} was very proud of it.|{His} {relative} had made it for {him}.||]
        {when} {H} [fell down|slipped|ran too fast], and the {thing} [broke|hit the floor and broke]. "Oh no! My {thing} is
        broken," said {H}. {He} tried to fix it, but [it did not work|{he} could not do it alone|it broke again].
        <feel_sad> {meet} <ask_why> {H} showed {F} the broken {thing}. <beg> <offer> {F} [brought|had|found] {tool}.
        [{H} held the {thing}, and {F} used {the_tool}.|They worked [slowly|carefully|all day].] [It was hard
        work.|It took a long time.|] [At last|Soon], the {color} {thing} was [as good as new|fixed|whole again]. <cheer>
        <thanks> <welcome> <after> [<friends_moral>|<moral> broken things can be fixed.] <close>""",
    "sharing": """
        {when} {H} had a [big |]basket full of {food}. {He} [went|took it] to the {place} to eat. [{sky}|] "These {food} are
        all for me," said {H}. {meet} {F} [had no food|was very hungry|had not eaten all day]. "[May|Can] I have some
        {food}[, please|]?" asked {F}. [{H} [shook {his} head|did not want to share]. "No, they are mine," {he} said.
        {F} [walked away|went away and sat alone]. Then {H} [looked at {F} and felt bad|felt sorry|was not hungry anymore]. "Wait, {F}!"
        <cried> {H}. "[Come back|Please come back|Come and eat with me]."|{H} thought for a moment. {He} looked at the
        {food}. Then {he} smiled. "Yes, [you may|of course]," {he} said.] {H} gave {F} half of the {food}. [They sat
        down|They sat under a tree] and ate together. [The {food} were sweet and good.|The {food} tasted very good.|] "Thank you[, {H}|]!"
        said {F}. "You are [very kind|so kind|a good friend]." {H} was <glad>. <after> <moral> [sharing is better than
        keeping everything|food tastes better with a friend|sharing makes two people happy|it feels good to share]. <close>""",
    "fear": """
        But {H} had a secret. {He} was afraid of {fear}. {when} {H} [was on the way to the {place}|was alone at home|was near
        the {place}]. [Suddenly|Then], {he} [began to shake|wanted to run away|hid behind a tree|closed {his} eyes]. "I am [so |]afraid of
        {fear}," {he} [said|whispered]. {meet} {F} [saw that {H} was afraid|sat down next to {him}]. "[Everyone is
        afraid sometimes|I was afraid of {fear} too|You are not alone]," <said> {F}. {F} [gave|brought] {him} {helpthing}.
        "[Take this|Hold this] and [stay close to me|count to ten|take a deep breath]," {F} said. {H} [held|took] {the_helpthing} and
        [counted to ten|took a deep breath|stayed close to {F}]. [Slowly|Little by little], {he} felt better. [It was not so bad after all.|]
        "[I am not afraid anymore|Look, I am brave now|I can do it]!" <cried> {H}. <thanks> <welcome> <after> <moral> [being
        brave means trying even when you are afraid|it is easier to be brave with a friend|everyone is afraid
        sometimes]. <close>""",
    "skill": """
        {H} wanted to learn to {skill}. {when} {he} tried to {skill} [for the first time|all alone|]. But [it was very
        hard|it did not go well|{he} could not do it]. {He} tried again and again. "I will never learn it," said {H}. <feel_sad>
        {meet} <ask_why> "I want to {skill}, but I cannot do it," said {H}. "[I can teach you|I will show you how|Watch
        me]," <said> {F}. "[You must practice every day|Go slowly and do not give up|Try it one more time]." {F} showed {him} how to {skill}. {H}
        [watched and tried again|listened and tried once more]. [The first time, it was still hard.|At first, it was
        not easy.|] They practiced [every day|all week|day after day]. [Then one day|At last], {H} {skilldone}. <cheer> "You [did
        it|are great]!" <cried> {F}. <thanks> <after> <moral> [practice makes things easy|it is good to never give
        up|if you try again and again, you can do it]. <close>""",
    "lost_baby": """
        {when} {H} [was walking|went for a walk] in the {place}. [{sky}|] [Suddenly|Then], {he} heard a small sound. {spot}
        sat a [little |tiny ]baby {baby}. "[I am lost|I cannot find my mother|I want to go home]," [cried|said] the baby {baby}.
        {H} felt sorry for the {baby}. "[Do not cry|Do not worry]," said {H}. "I will help you find your mother." {meet}
        <beg> "[Of course|Yes]," <said> {F}. They looked [behind every tree|all over the {place}|here and there] and called
        [loudly|for the mother]. [They walked and walked.|The sun began to go down.|] [At last|Then], {F} saw a big {mother}
        [near the {place}|next to a tree|far away]. "[That is my mother|Mother]!" <cried> the baby {baby}. The mother was <glad>. "[Thank you for
        bringing my baby home|You are both very kind|Thank you both]," she said. {H} and {F} [waved goodbye|smiled|felt proud].
        <after> <moral> [it feels good to help others|even small friends need help|a kind heart is a treasure]. <close>""",
    "gift": """
        {when} it was the birthday of {his} {relative}. {H} wanted to make a [nice|big|special|very good] {gift} as a
        surprise. {He} [looked in the kitchen|looked all over the house|opened every box]. But {he} could not find any {part}. "[I
        cannot make a {gift} without {part}|Oh no, I need {part} for the {gift}]," said {H}. <feel_sad> {He} went to the
        {place}. {meet} <ask_why> "I need {part} to make a {gift} for my {relative}," said {H}. "[I have some at home|I can give you
        what you need|We can look for it together]," <said> {F}. {F} [gave {him} {part}|came back with {part}]. <thanks>
        Then {H} and {F} [worked together|went home] and made the {gift}. [It was a lot of fun.|It took all day.|] {H} gave the {gift}
        to {his} {relative}. "[What a lovely {gift}|This is the best {gift} ever|Oh, a {gift} for me]!" {his} {relative} said.
        {Rel} was <glad>. [They all sat together and celebrated.|] <moral> [the best gifts come from the
        heart|a gift is better when friends help|making others happy feels good]. <close>""",
    "garden": """
        {when} {H} found a small seed in the {place}. "[I will plant it|I want to see it grow]," said {H}. {He} put the seed
        in the ground and [gave it some water|waited]. {He} waited [one day, two days, three days|all week|for many days], but nothing [happened|came
        up]. [The sun was hot, and the ground was dry.|It did not rain at all.] <feel_sad> {meet} <ask_why> "My seed does
        not grow," said {H}. "[A seed needs water and time|You must be patient|It needs water every day]," <said> {F}. "[I
        will help you|We can do it together]." Every day, {H} and {F} carried water from the [river|well|lake].
        [They sang to the seed.|They pulled out the weeds.|] [Then one morning|One day], a small green leaf came out of the
        ground. "[Look|It is growing|Hooray]!" <cried> {H}. It grew and grew. Soon it was a {plant}, {plantlook}. {H} was
        <glad>. <thanks> <welcome> <after> <moral> [good things take time|it is good to be patient|little things can
        grow big with love]. <close>""",
    "lost_way": """
        {when} {H} went for a walk in the {place}. [{sky}|] {He} followed a [{color} butterfly|small {color} bird|{color} leaf]
        and walked [too far|for a long time|far away]. [When {he} looked around|Then], {he} did not know the way home. "I
        am lost," said {H}. [It was getting dark.|The wind was cold.|] <feel_sad> {meet} <ask_why> "I
        cannot find my way home," said {H}. "Where do you live?" asked {F}. "I live {home}," said {H}. "[I know the
        way|I know that place]," <said> {F}. "[Come with me|Follow me|Take my hand]." They walked [over the hill|along the
        path|past the old mill] and [through the trees|across a bridge|down the road]. [{F} sang a song, and {H} was not afraid anymore.|]
        [At last|Soon], {H} saw {his} home. {His} {relative} [came out|was waiting at the door] and gave {him} a [big |warm ]hug.
        <thanks> <welcome> [{F} stayed for dinner, and they ate {food}.|] <moral> [it is good to ask for
        help|it is better not to walk too far alone|a kind friend can show the way]. <close>""",
    "truth": """
        {when} {H} was playing [at home|in the house] with {his} {color} {thing}. {His} {relative} had a beautiful {precious}.
        {H} [was not careful|ran too fast|jumped too high], and the {precious} [fell down and broke|broke into pieces]. "Oh
        no," [said|whispered] {H}. "What will my {relative} say?" {He} hid the pieces {hide}. <feel_sad> {meet}
        <ask_why> "I broke the {precious}, and I am afraid to tell," said {H}. "[You should tell the truth|It is best to tell
        the truth|Just say that you are sorry]," <said> {F}. "I will [come|go] with you." So {H} went to {his} {relative}. "I broke
        the {precious}. I am [so |very |]sorry," said {H}. {His} {relative} [was quiet for a moment|looked at {him}]. Then {rel}
        smiled. "[Thank you for telling the truth|I am not angry|You were brave to tell me]," {rel} said. [They cleaned up
        the pieces together.|They fixed the {precious} together.] {H} felt [much better|light and happy again]. <thanks> <moral>
        [it is always best to tell the truth|telling the truth takes courage|everyone makes mistakes]. <close>""",
    "rescue": """
        {when} {H} and {his} {relative} were in the {place}. [{sky}|] [Suddenly|Then], they heard a voice. "[Help! Help me|Please
        help me]!" It was a {ftrait} {fkind} named {F}. {F} was stuck {trap}. "[Do not be afraid|Do not move|Hold on]!" <cried> {H}. "I
        will get you out." {H} pulled and pulled, but {F} was still stuck. {H} [thought hard|had an idea]. {He} ran home and
        came back with {puller}. "[Hold this|Take this] and do not let go," said {H}. {H} and {his} {relative} pulled [with all their
        might|as hard as they could]. [One, two, three!|] Out came {F}! "Thank you[, {H}| so much|]!" said {F}. "You saved
        me." {F} [shared some {food} with {H}|gave {H} a {color} {thing}|gave {H} a big hug]. {H} was <glad>. <after> <moral> [it is good
        to help others|even a small friend can do great things|being kind makes new friends]. <close>""",
    "build": """
        {when} {H} wanted to build {build}. {He} went to the {place} and [started to work|began to build]. [{sky}|] But {H}
        was in a hurry. [Soon|After a while], everything fell down. "Oh no, not again," said {H}. {He} tried again, but it
        [fell down|broke] once more. <feel_sad> {meet} <ask_why> "I want to build {build}, but it always falls down," said
        {H}. "[We can build it together|Two can build better than one|Let us start again, slowly]," <said> {F}. {H} [carried|brought] what they
        needed, and {F} [held everything in place|put it all together]. [They worked [all day|for hours].|They took their
        time.] [At last|In the end], they had built {build}. It was [strong and beautiful|perfect|even better than before]. <cheer> {H} and {F}
        {buildplay}. <thanks> <welcome> <moral> [working together makes hard things easy|it is better to go
        slowly|two friends can do more than one]. <close>""",
    "wish": """
        {H} wanted a {color} {thing} more than anything. {when} {he} saw a {color} {thing} at the market. But {he} had no
        money. <feel_sad> {meet} <ask_why> "I want that {color} {thing}, but I have no money," said {H}. "[You can work for
        it|We can sell {food} at the market|We can earn some money together]," <said> {F}. So {H} and {F} [picked {food} in the {place}|found
        many {food} in the {place}] and sold them [at the market|to the people]. [It was hard work, but they laughed a
        lot.|They worked all day.] [In the evening|At last], {H} had enough money. {He} ran to the market and bought the
        {color} {thing}. <cheer> [{He} let {F} play with it first.|"This {thing} is for both of us," said {H}.|"Let us share it," {H} told {F}.]
        {F} was <glad>. <after> <moral> [hard work brings good things|things are better when you work for them|a
        shared dream is twice as sweet]. <close>""",
}


class Draw:
    """Random choices from one seed, with the bits they cost: an upper bound for a story's entropy."""

    def __init__(self, seed: str):
        self.rng = random.Random(seed)
        self.bits = 0.0

    def one(self, options):
        options = list(options)
        self.bits += log2(len(options))
        return options[self.rng.randrange(len(options))]

    def phrase(self, options):
        return self.one(options).replace("_", " ")

    def chance(self, num: int, den: int) -> bool:
        yes = self.rng.randrange(den) < num
        self.bits -= log2((num if yes else den - num) / den)
        return yes


def invented_name(draw: Draw) -> str:
    """An invented name, so that the model learns to copy names without their own token."""
    syllables = [draw.one("b d f g h j k l m n p r s t v w z".split()) + draw.one("aeiou") for _ in range(2)]
    return ("".join(syllables) + draw.one(["", "", "n", "l", "k", "x", "p", "r"])).capitalize()


def character(draw: Draw, names: dict[str, list[str]], hero: str = "", hero_kind: str = "") -> tuple[str, str, str]:
    """A name, kind, and `he` or `she`; a friend's name and animal differ from the hero's."""
    while True:
        he = draw.one(["he", "she"])
        kind = draw.one(ANIMALS) if draw.chance(1, 2) else {"he": "boy", "she": "girl"}[he]
        name = invented_name(draw) if draw.chance(1, 6) else draw.one(names[he])
        if name[:2] != hero[:2] and (kind != hero_kind or kind in ("boy", "girl")):
            return name, kind, he


def cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def cast(draw: Draw, plot: str) -> dict[str, str]:
    """All choices that stay fixed through the story."""
    name, kind, he = character(draw, HERO_NAMES)
    friend, fkind, _ = character(draw, FRIEND_NAMES, name, kind)
    things = {"broken_object": BREAKABLE, "stuck_object": FLYING}.get(plot, OBJECTS)
    relative = draw.one(RELATIVES)
    slots = {
        "H": name, "kind": kind, "he": he, "him": "him" if he == "he" else "her", "his": "his" if he == "he" else "her",
        "F": friend, "fkind": fkind, "trait": draw.one(TRAITS), "ftrait": draw.one(TRAITS),
        "the_kind": "" if kind in ("boy", "girl") else f" the {kind}", "home": draw.phrase(HOMES),
        "place": draw.one(INSIDE_PLACES if plot in INSIDE_PLOTS else PLACES), "color": draw.one(COLORS), "thing": draw.phrase(things),
        "food": draw.one(FRUITS if plot == "wish" else FOODS), "relative": relative, "rel": RELATIVES[relative],
    }  # fmt: skip
    slots["weather"], skies = draw.one(WEATHER.items())
    slots["sky"] = f"[{'|'.join(skies)}]"
    slots |= {"He": cap(he), "His": cap(slots["his"]), "Rel": cap(slots["rel"])}
    if plot in ("lost_object", "lost_baby"):
        slots["spot"] = draw.phrase(SPOTS)
    if plot == "stuck_object":
        slots["reacher"] = draw.phrase(REACHERS)
    if plot == "broken_object":
        slots["tool"] = draw.phrase(TOOLS)
    if plot == "fear":
        slots["fear"], slots["helpthing"] = draw.one(FEARS.items())
    if plot == "skill":
        slots["skill"], slots["skilldone"] = draw.one(SKILLS.items())
    if plot == "lost_baby":
        free = [pair for pair in BABIES.items() if not {kind, fkind} & set(pair)]
        slots["baby"], slots["mother"] = draw.one(free)
    if plot == "gift":
        slots["gift"] = draw.one(GIFTS)
        slots["part"] = draw.one(GIFTS[slots["gift"]])
    if plot == "garden":
        slots["plant"], slots["plantlook"] = draw.one(PLANTS.items())
    if plot == "truth":
        slots["precious"] = draw.one(PRECIOUS)
        slots["hide"] = draw.one(["under the bed", "behind the door", "in a box", "under the rug"])
    if plot == "rescue":
        slots["trap"], slots["puller"] = draw.phrase(TRAPS), draw.phrase(PULLERS)
    for name in ("reacher", "helpthing", "tool"):
        if name in slots:
            slots[f"the_{name}"] = re.sub(r"^(a|an|some) ", "the ", slots[name])
    if plot == "build":
        slots["build"], slots["buildplay"] = draw.one(BUILDS.items())
    return slots


def split_top(text: str) -> list[str]:
    """Splits at each `|` outside brackets."""
    parts, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        depth += (ch == "[") - (ch == "]")
        if ch == "|" and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def expand(draw: Draw, text: str, slots: dict[str, str]) -> str:
    """Expands the three marks, left to right."""
    out, i = [], 0
    while i < len(text):
        ch = text[i]
        if ch == "[":
            depth, end = 1, i + 1
            while depth:
                depth += (text[end] == "[") - (text[end] == "]")
                end += 1
            out.append(expand(draw, draw.one(split_top(text[i + 1 : end - 1])), slots))
            i = end
        elif ch in "<{":
            end = text.index(">" if ch == "<" else "}", i)
            name = text[i + 1 : end]
            out.append(expand(draw, RULES[name], slots) if ch == "<" else expand(draw, slots[name], slots))
            i = end + 1
        else:
            out.append(ch)
            i += 1
    return "".join(out)


def tidy(text: str) -> str:
    """One space between words, `an` before a vowel, a capital after a full stop."""
    text = re.sub(r"\s+([.,!?])", r"\1", " ".join(text.split()))
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return re.sub(r"(^|[.!?] |\.\" )([a-z])", lambda m: m[1] + m[2].upper(), text)


def story(split: str, index: int) -> tuple[str, float]:
    """Story `index` of a split ("train" or "held-out"), and the bits of its choices."""
    draw = Draw(f"{split} {index}")
    plot = draw.one(PLOTS)
    slots = cast(draw, plot)
    with_day = draw.chance(1, 4) and plot not in ("lost_object", "broken_object", "fear", "skill", "wish")
    known = plot != "rescue" and draw.chance(1, 2)
    slots["when"] = draw.one(["That day,", "Later that day,"]) if with_day else "<when>"
    slots["meet"] = "<meet_known>" if known else "<meet_new>"
    opening = RULES["opening_day" if with_day else "opening"]
    start = expand(draw, opening, slots)
    if any(sky in start for sky in WEATHER[slots["weather"]]):
        slots["sky"] = ""  # the sky is described once
    rest = expand(draw, f"{'<friend_before>' if known else ''} {PLOTS[plot]}", slots)
    return tidy(f"{start} {rest}"), draw.bits


if __name__ == "__main__":
    for index in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        print(story("train", index)[0], end="\n\n")
