"""What people say to the small assistant: a context-free grammar of questions, watch requests and small talk.

    sentence(random.Random(1), "domain")      # "Tell me when the red ball appears."

A rule is a list of alternatives; <name> stands for a rule, [text] is left out half of the time, a number before `*` at the
start of an alternative is its weight. The grammar knows words only: what is true of a scene is not its business.
"""

from __future__ import annotations

import random
import re

_RULES_TEXT = """
domain = 5*<question> | 2*<watch> | 2*<talk> | <outside> | <answer> | <control>

question = 3*<colour_q> | 2*<shape_q> | 3*<number_q> | 3*<place_q> | 2*<size_q> | 3*<motion_q> | 2*<change_q> | 3*<general_q> | 2*<yesno_q> | <card_q> | <how_q>
lead = hey | hey Aura | Aura | okay | so | and | now | please | excuse me | hello | hi | well
tail = please | now | right now | at the moment | here | for me | Aura

colour_q = what colour is <the_thing>[ <where>]? | what colour is the <place> <thing>? | what is the colour of <the_thing>[ <where>]? | what's the colour of <the_thing>? | which colour is <the_thing>? | which colour does <the_thing> have? | what colours do you see? | what colours are there? | tell me the colour of <the_thing>. | can you tell me the colour of <the_thing>[ <where>]? | what colour is it? | what colour is that? | what colour is this <thing>? | what colour is the background? | which colours can you see? | what colour are the <things>? | what colour was <the_thing>? | is it <colour> or <colour>? | is the <thing> <colour> or <colour>? | name the colours you see.
shape_q = what shape is <the_thing>? | what shape is it? | what shape is the <colour> one? | what shape do you see[ <where>]? | which shape is <colour>? | which shape is <where>? | what is the shape of <the_thing>? | what kind of shape is that? | what shapes are there? | what shapes do you see? | which shapes can you see? | tell me the shape of <the_thing>. | is it a <shape> or a <shape>? | what is the <colour> thing? | what is the <colour> shape called? | name the shape <where>.
number_q = 3*how many <things> do you see? | how many <colour> ones are there? | how many <things>? | how many things do you see? | how many objects can you see? | how many <things> do I have? | how many <things> are there? | how many <things> do you see? | how many <things> can you see[ <where>]? | how many <colour> <things> are there[ <where>]? | how many shapes are there[ in total]? | how many objects are there? | how many things are there on the screen? | count the <things>. | count the <colour> <things>. | can you count the <things>[ for me]? | please count them. | what is the number of <things>? | how many are <colour>? | how many are there now? | how many different colours do you see? | are there <number> <things>? | are there more <things> than <things>? | are there more <colour> things or <colour> things? | which are there more of, <things> or <things>? | how many <things> were there? | do you see <number> <colour> <things>? | is there more than one <thing>?
place_q = 3*where is <the_thing>? | where's <the_thing>? | where can I find <the_thing>? | what is the position of <the_thing>? | in which place is <the_thing>? | where are the <things>? | where is it? | where is it now? | where do you see <the_thing>? | where can you see <the_thing>? | is <the_thing> on the left or on the right? | is <the_thing> <where>? | what is <where>? | what's <where>? | what do you see <where>? | what is <rel> <the_thing>? | which shape is <rel> <the_thing>? | what is next to <the_thing>? | is <the_thing> <rel> <the_thing>? | on which side is <the_thing>? | which side is the <thing> on? | what is in the middle? | what's in the corner? | in which corner is <the_thing>? | tell me where <the_thing> is. | can you find <the_thing>? | where was <the_thing>?
size_q = how big is <the_thing>? | how large is <the_thing>? | is <the_thing> big or small? | is <the_thing> large or small? | is it <size>? | which <thing> is <bigger>? | which shape is the <biggest>? | what is the <biggest> shape? | what colour is the <biggest> <thing>? | is <the_thing> <bigger> than <the_thing>? | which one is <bigger>? | which one is the <biggest>? | what size is <the_thing>? | are they the same size? | what size is it?
motion_q = is <the_thing> moving? | is anything moving? | does anything move? | what is moving? | which shape is moving? | where is <the_thing> going? | which way is <the_thing> moving? | which way does <the_thing> go? | in which direction is <the_thing> moving? | what direction is it moving? | is <the_thing> moving <dir>? | how is <the_thing> moving? | what is <the_thing> doing? | what is it doing? | is it moving fast or slowly? | how fast is <the_thing> moving? | did <the_thing> move? | has <the_thing> moved? | has it stopped? | is it still moving? | did the <thing> stop? | is <the_thing> moving to the left or to the right? | is the <thing> going up or down? | is it getting <bigger>? | does it turn? | is <the_thing> spinning?
change_q = what changed? | what has changed? | what just changed? | what just happened? | what happened? | did anything change? | has anything changed? | what is new? | what's new? | what is different[ now]? | what disappeared? | what has disappeared? | what appeared? | what just appeared? | did something appear? | did <the_thing> disappear? | has <the_thing> appeared? | did <the_thing> change colour? | what was there before? | what was it before? | which shape is gone? | is <the_thing> still there? | is it gone? | what is missing?
general_q = 2*what do you see? | tell me about the picture. | describe the image. | describe the video. | what are you seeing? | which things do you see? | what is in the video? | what is in the scene? | what is in front of you? | what is here? | what's here? | what's there? | what can you see? | what can you see <where>? | what is this? | what's this? | what is that? | what is there? | what is on the screen? | what is in the picture? | what's in front of you? | what am I holding? | what do I have here? | what am I showing you? | describe what you see. | describe the picture. | describe the scene. | tell me what you see. | what are you looking at? | do you see anything? | can you see anything? | is anything there? | is there anything[ <where>]? | what is going on? | what's happening? | what is happening now? | look at this. | can you describe it? | what else do you see? | anything else? | and now? | what about now? | what do you see now?
yesno_q = is there <a_thing>[ <where>]? | do you see <a_thing>[ <where>]? | can you see <a_thing>[ <where>]? | is <the_thing> <colour>? | is it <colour>? | is it a <shape>? | is the <thing> a <shape>? | is there a <colour> one? | are there any <things>? | are there any <colour> <things>? | do you see any <things>? | is this <a_thing>? | is that <a_thing>? | are all the <things> <colour>? | are they the same colour? | are they all <colour>? | is everything <colour>? | do they have the same shape? | is there only one <thing>?
card_q = what colour is the card? | what colour is this card? | which card am I holding? | what colour is the card in my hand? | is this card <colour>? | is the card <colour> or <colour>? | what colour am I holding up? | am I holding a <colour> card? | what is in my hand? | do you see my hand? | which colour am I showing you?
how_q = and the <colour> one? | and the <thing>? | and the other one? | what about the <colour> <thing>? | what about the <thing> <where>? | and <where>? | how about the <colour> one? | and the <biggest> one? | the <colour> one. | the <thing> <where>.

watch = <w_verb> when <event>. | <w_verb> if <event>. | <w_verb> as soon as <event>. | <w_verb> every time <event>. | <w_verb> whenever <event>. | <w_verb> each time <event>. | <w_verb> once <event>. | watch <the_thing>[ and tell me when it <does>]. | keep an eye on <the_thing>. | look out for <a_thing>. | wait for <a_thing>[ and tell me]. | when <event>, tell me. | when <event>, say <word>. | say <word> when <event>. | say <word> every time <event>. | can you say <word> when <event>? | count the <things> as they appear. | can you tell me when <event>? | could you tell me when <event>? | will you warn me when <event>? | I want to know when <event>. | watch for <a_thing>. | stop watching. | you can stop now. | stop telling me. | forget it. | never mind. | stop watching <the_thing>. | no more alerts, please.
w_verb = 4*tell me | 2*let me know | inform me | let me know | please tell me | please let me know | say something | warn me | alert me | give me a sign | notify me | say stop | speak up | shout
event = <a_thing> appears | <the_thing> appears | you see <a_thing> | there is <a_thing> | <the_thing> disappears | <the_thing> is gone | <the_thing> moves | <the_thing> starts moving | <the_thing> stops | <the_thing> stops moving | it moves | it stops | it disappears | something moves | something changes | something appears | anything changes | <the_thing> changes colour | <the_thing> turns <colour> | it turns <colour> | there are <number> <things> | you see <number> <things> | <the_thing> is <where> | <the_thing> reaches the <edge> | <the_thing> goes <dir> | a new shape appears | I show you a <colour> card | the card is <colour> | I hold up a <colour> card | you see something <colour> | there is something <colour> | <the_thing> leaves | <the_thing> goes away | <the_thing> comes back | <the_thing> shows up | <the_thing> starts to move | <a_thing> shows up | <a_thing> comes | something <colour> appears | <the_thing> becomes <colour>
word = <colour> | now | stop | hello | here | yes | go | bingo | there | look | hey
does = moves | stops | disappears | comes back | turns <colour> | changes | goes away | appears

talk = hello. | hello there. | hi. | hi there. | hey. | hey Aura. | hello Aura. | hi Aura. | good morning. | good afternoon. | good evening. | good night. | how are you? | how are you today? | how is it going? | nice to meet you. | goodbye. | bye. | bye bye. | see you later. | see you tomorrow. | thank you. | thanks. | thanks a lot. | thank you very much. | many thanks. | you're welcome. | who are you? | what are you? | what is your name? | what's your name? | are you a robot? | are you there? | can you hear me? | do you hear me? | can you see me? | are you listening? | what can you do? | what can you do for me? | how can you help me? | can you help me? | help me, please. | what can I ask you? | what do you know? | what should I ask you? | how do you work? | who made you? | yes. | no. | yes, please. | no, thanks. | no, thank you. | okay. | all right. | right. | sure. | great. | well done. | very good. | good job. | that is right. | that is correct. | that is wrong. | that's wrong. | you are wrong. | I see. | really? | are you sure? | sorry. | excuse me. | I don't understand. | say that again. | say it again, please. | can you repeat that? | what did you say? | please speak louder. | I am fine. | I like you. | you are nice. | my name is <name>. | I am <name>. | nice to see you, <name>. | let's play a game. | let's start. | I have a question. | ready? | are you ready? | tell me about yourself.
outside = 8*<about> | 6*<small> | what is the weather like[ today]? | what time is it? | what day is it today? | tell me a joke. | sing a song. | who is the president? | what is the capital of <country>? | how old are you? | where do you live? | what is <number> plus <number>? | what is <number> times <number>? | play some music. | call <name>. | open the door. | turn on the light. | turn off the light. | set a timer for <number> minutes. | wake me up at <number>. | how do I cook rice? | what should I eat today? | will it rain tomorrow? | translate this into <language>. | do you speak <language>? | how far is the moon? | who won the game? | read me the news. | send a message to <name>. | book a table for <number>. | what does this word mean? | who is in the picture? | what does the sign say? | write a poem. | tell me a story. | is there a person? | can you read this? | what is the name of this animal? | what are you thinking about? | do you like <language> food? | where is the station? | how much does it cost?
about = what is the <noun>? | what's the <noun>? | who is the <noun>? | where is the <noun>? | how is the <noun>? | tell me about the <noun>. | is there a <noun>? | do you see a <noun>? | do you have a <noun>? | do you know the <noun>? | what do you think about the <noun>? | how old is the <noun>? | how much is the <noun>? | when is the <noun>? | can you find the <noun>? | can you show me the <noun>? | what colour is the <noun>? | is the <noun> <colour>? | how many <noun>s are there? | where can I buy a <noun>? | who is <name>? | where is <country>? | tell me about <country>. | how far is <country>? | do you know <name>? | can you <verb>? | do you <verb>? | how do I <verb> a <noun>? | should I <verb> the <noun>? | can you <verb> the <noun>? | please <verb> my <noun>. | I want to <verb> a <noun>. | I like the <noun>. | I have a <noun> and a <noun>. | what is the difference between a <noun> and a <noun>? | my <noun> is broken. | the <noun> is in the <noun>. | when does the <noun> start? | why do people <verb>? | who won the <noun>? | order me a <noun>. | who invented the <noun>? | write a letter about the <noun>. | <name> is a <noun>. | remind me to <verb>. | what did I <verb> yesterday?
small = I am <mood>. | are you <mood>? | it is <weather> today. | where are you from? | do you like me? | are you human? | are you an assistant? | introduce yourself. | is this working? | test. | testing. | testing, testing. | one, two, three. | greetings. | perfect. | wonderful. | excellent. | cool. | nice. | fine. | good. | alright. | what are you able to do? | what are you good at? | how does this work? | what are your abilities? | what can you tell me? | count to <number>. | what is <number> minus <number>? | have a nice day. | how do you do? | what was the question? | set an alarm. | what day is tomorrow? | um. | uh. | hmm. | oh. | <number>. | <colour>. | <a_thing>.
mood = tired | hungry | happy | sad | bored | late | cold | thirsty | sleepy | fine | okay | here | ready | busy | hot | angry | lost
weather = cold | hot | raining | late | early | sunny | windy | warm | snowing | dark | nice
noun = weather | time | president | capital | news | game | market | dog | cat | car | house | tree | person | man | woman | baby | phone | computer | music | song | movie | book | food | pizza | coffee | breakfast | lunch | dinner | price | city | history | king | queen | station | restaurant | recipe | temperature | date | traffic | war | winner | election | internet | airport | hospital | doctor | teacher | school | homework | ocean | mountain | river | building | bicycle | airplane | bird | horse | elephant | lion | fish | table | chair | window | door | lamp | shirt | shoe | hat | bottle | cup | key | money | bank | job | company | laptop | camera | email | letter | language | poem | joke | story | secret | dream | brother | sister | mother | father | wife | husband | friend | birthday | holiday | winter | summer | rain | snow | wind | universe | kitchen | garden | street | apple | orange | banana | bread | cheese | water | tea | milk | sugar | salt | flower | sun | star | planet | boat | ship | train | bus | radio | television | paper | pen | pencil | bag | coat | glass | plate | spoon | knife | clock | watch | wall | floor | bed | hand | head | face | foot | finger
verb = eat | drink | sleep | run | cook | drive | fly | swim | sing | dance | write | read | buy | sell | love | hate | play | win | lose | build | repair | learn | teach | visit | call | clean | open | close | fix | paint | find | carry | hold | throw | catch | push | pull | wash | cut | draw | use | move | stop | start | bring | take | give | send | show | keep | leave | count | remember | forget
control = stop. | stop it. | stop talking. | be quiet. | please be quiet. | quiet, please. | wait. | wait a moment. | just a second. | one moment, please. | go on. | continue. | start again. | start over. | again. | louder, please. | speak more slowly. | cancel that. | that's enough. | enough. | pause. | silence, please.
answer = <a_thing> <where>. | I see <a_thing>. | I see <a_thing> and <a_thing>. | I see <number> <things>. | there are <number> <colour> <things>. | there is <a_thing> <where>. | it is <colour>. | it is <where>. | the <thing> is <colour>. | <the_thing> is <where>. | <the_thing> is moving <dir>. | it moves <dir>. | <the_thing> just appeared. | <the_thing> has disappeared. | <the_thing> turned <colour>. | the <colour> <thing> is <bigger>. | it is a <colour> <shape>. | nothing is moving. | I don't know that. | okay, I will tell you. | I will let you know. | nothing has changed. | I can only talk about what I see.

colour = 3*red | 3*green | 3*blue | 3*yellow | 2*orange | 2*purple | 2*pink | 2*black | 2*white | brown | grey | turquoise | violet | <tone> <plain>
tone = dark | light | bright
plain = red | green | blue | yellow | grey
shape = 3*circle | 3*square | 3*triangle | 2*star | 2*ball | heart | diamond | cross | rectangle | ring | hexagon | pentagon | oval | arrow | moon | cube | plus | crescent | pyramid
shapes = 3*circles | 3*squares | 3*triangles | 2*stars | 2*balls | hearts | diamonds | crosses | rectangles | rings | hexagons | pentagons | ovals | arrows | moons | cubes | pluses | pyramids
thing = 8*<shape> | shape | object | thing | card | dot | box | line | spot | figure
things = 8*<shapes> | shapes | objects | things | cards | dots | boxes | lines | spots
the_thing = 4*the <thing> | 5*the <colour> <thing> | the <size> <thing> | the <colour> one | the <size> <colour> <thing> | the <thing> <where> | the other <thing>
a_thing = 2*a <thing> | 5*a <colour> <thing> | a <size> <thing> | a <size> <colour> <thing> | another <thing> | something <colour> | an orange <thing>
where = on the left | on the right | in the middle | in the centre | at the top | at the bottom | on top | in the corner | in the top left corner | in the top right corner | in the bottom left corner | in the bottom right corner | on the left side | on the right side | at the top left | at the bottom right | at the edge | in the picture | on the screen | in front of you | there | up there | down there | in the background
place = left | right | upper | lower | top | bottom | middle | first | second | third | last | other | next
rel = to the left of | to the right of | left of | right of | above | below | under | over | next to | beside | near | behind | in front of | inside | between the <things> and
edge = edge | left edge | right edge | top | bottom | corner | middle
dir = left | right | up | down | to the left | to the right | upwards | downwards | away | in a circle | fast | slowly | back and forth | up and down
size = big | small | large | little | tiny | huge
bigger = bigger | smaller | larger
biggest = biggest | smallest | largest
number = one | two | three | four | five | six | seven | eight | nine | ten | eleven | twelve | zero | twenty
name = Anna | Peter | Mary | John | Tom | Lucy | David | Sarah | Alex | Emma | Paul | Laura
country = France | Germany | Italy | Spain | China | Japan | England | India | Brazil
language = English | French | German | Italian | Spanish | Chinese | Japanese
"""

_WEIGHT = re.compile(r"^(\d+)\*")
_SYMBOL = re.compile(r"<(\w+)>")


def _parsed(text: str) -> dict[str, tuple[list[str], list[int]]]:
    rules: dict[str, tuple[list[str], list[int]]] = {}
    for line in text.strip().splitlines():
        name, _, right = line.partition(" = ")
        if not right:
            continue
        choices, weights = [], []
        for choice in right.split(" | "):
            found = _WEIGHT.match(choice)
            choices.append(choice[found.end() :] if found else choice)
            weights.append(int(found.group(1)) if found else 1)
        rules[name] = (choices, weights)
    return rules


RULES = _parsed(_RULES_TEXT)


def expand(random_: random.Random, symbol: str) -> str:
    """One expansion of a rule, as it stands in the grammar."""
    choices, weights = RULES[symbol]
    text = random_.choices(choices, weights)[0]
    text = re.sub(r"\[([^\]]*)\]", lambda found: found.group(1) if random_.random() < 0.5 else "", text)
    return _SYMBOL.sub(lambda found: expand(random_, found.group(1)), text)


def sentence(random_: random.Random, symbol: str = "domain") -> str:
    """A whole sentence: sometimes a lead and a tail around it, a capital first, a full stop or question mark last."""
    text = expand(random_, symbol)
    if symbol in ("domain", "question", "watch"):
        if random_.random() < 0.12:
            text = f"{expand(random_, 'lead')}, {text}"
        if random_.random() < 0.08 and text[-1] in ".?" and "," not in text:
            text = f"{text[:-1]}{random_.choice([',', ''])} {expand(random_, 'tail')}{text[-1]}"
    text = re.sub(r"\ba (?=[aeiou])", "an ", text)
    return text[0].upper() + text[1:]
