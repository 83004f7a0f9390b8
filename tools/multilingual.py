"""Writes multilingual.txt, short everyday sentences in fifteen languages, shuffled and without labels, and next to it
multilingual_languages.txt, the language of each line as a code of ISO 639-1.

    python -m tools.multilingual                   the shipped files, in example_data
    python -m tools.multilingual folder=. seed=1   other files

Each sentence says what someone does at some time. In every language the persons are women, so that verbs that agree
with their subject's gender are right in all sentences. The output is identical on every machine.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import chz

from tinker_cookbook.cli_utils import run_recipe
from tinker_cookbook.data.shipped import EXAMPLE_DATA
from tinker_cookbook.field_groups import Seeded
from tinker_cookbook.utils.files import write_text

LINES_PER_LANGUAGE = 140
FILE, LANGUAGES_FILE = "multilingual.txt", "multilingual_languages.txt"


@dataclass(frozen=True)
class Language:
    """Sentence templates of a language. {n} is the person, {t} the time; every time fits every sentence."""

    names: tuple[str, ...]
    times: tuple[str, ...]
    sentences: tuple[str, ...]


LANGUAGES: dict[str, Language] = {
    "ar": Language(
        ("ليلى", "سارة", "مريم", "فاطمة", "نور"),
        ("اليوم", "كل يوم", "في الصباح", "في المساء", "يوم الاثنين", "يوم السبت"),
        (
            "تقرأ {n} كتابًا {t}.",
            "تشرب {n} كوبًا من الماء {t}.",
            "تكتب {n} رسالة {t}.",
            "تشتري {n} الخبز {t}.",
            "تعمل {n} في الحديقة {t}.",
            "تنتظر {n} في المحطة {t}.",
            "تذهب {n} إلى المدرسة {t}.",
            "تفتح {n} النافذة {t}.",
            "تطبخ {n} الحساء {t}.",
            "تستمع {n} إلى الموسيقى {t}.",
        ),
    ),
    "de": Language(
        ("Anna", "Greta", "Ingrid", "Heike", "Ursula"),
        ("heute", "jeden Tag", "am Morgen", "am Abend", "am Montag", "am Samstag"),
        (
            "{n} liest {t} ein Buch.",
            "{n} trinkt {t} ein Glas Wasser.",
            "{n} schreibt {t} einen Brief.",
            "{n} kauft {t} Brot.",
            "{n} arbeitet {t} im Garten.",
            "{n} wartet {t} am Bahnhof.",
            "{n} geht {t} in die Schule.",
            "{n} öffnet {t} das Fenster.",
            "{n} kocht {t} eine Suppe.",
            "{n} hört {t} Musik.",
        ),
    ),
    "el": Language(
        ("Άννα", "Μαρία", "Ελένη", "Σοφία", "Κατερίνα"),
        ("σήμερα", "κάθε μέρα", "το πρωί", "το βράδυ", "τη Δευτέρα", "το Σάββατο"),
        (
            "Η {n} διαβάζει ένα βιβλίο {t}.",
            "Η {n} πίνει ένα ποτήρι νερό {t}.",
            "Η {n} γράφει ένα γράμμα {t}.",
            "Η {n} αγοράζει ψωμί {t}.",
            "Η {n} δουλεύει στον κήπο {t}.",
            "Η {n} περιμένει στον σταθμό {t}.",
            "Η {n} πηγαίνει στο σχολείο {t}.",
            "Η {n} ανοίγει το παράθυρο {t}.",
            "Η {n} μαγειρεύει σούπα {t}.",
            "Η {n} ακούει μουσική {t}.",
        ),
    ),
    "en": Language(
        ("Alice", "Emily", "Grace", "Helen", "Lucy"),
        ("today", "every day", "in the morning", "in the evening", "on Monday", "on Saturday"),
        (
            "{n} reads a book {t}.",
            "{n} drinks a glass of water {t}.",
            "{n} writes a letter {t}.",
            "{n} buys bread {t}.",
            "{n} works in the garden {t}.",
            "{n} waits at the station {t}.",
            "{n} goes to school {t}.",
            "{n} opens the window {t}.",
            "{n} cooks soup {t}.",
            "{n} listens to music {t}.",
        ),
    ),
    "es": Language(
        ("Carmen", "Lucía", "Pilar", "Rosa", "Elena"),
        ("hoy", "todos los días", "por la mañana", "por la noche", "el lunes", "el sábado"),
        (
            "{n} lee un libro {t}.",
            "{n} bebe un vaso de agua {t}.",
            "{n} escribe una carta {t}.",
            "{n} compra pan {t}.",
            "{n} trabaja en el jardín {t}.",
            "{n} espera en la estación {t}.",
            "{n} va a la escuela {t}.",
            "{n} abre la ventana {t}.",
            "{n} cocina una sopa {t}.",
            "{n} escucha música {t}.",
        ),
    ),
    "fr": Language(
        ("Camille", "Claire", "Juliette", "Manon", "Sylvie"),
        ("aujourd'hui", "tous les jours", "le matin", "le soir", "le lundi", "le samedi"),
        (
            "{n} lit un livre {t}.",
            "{n} boit un verre d'eau {t}.",
            "{n} écrit une lettre {t}.",
            "{n} achète du pain {t}.",
            "{n} travaille dans le jardin {t}.",
            "{n} attend à la gare {t}.",
            "{n} va à l'école {t}.",
            "{n} ouvre la fenêtre {t}.",
            "{n} prépare une soupe {t}.",
            "{n} écoute de la musique {t}.",
        ),
    ),
    "hi": Language(
        ("सीता", "राधा", "मीरा", "गीता", "सुनीता"),
        ("आज", "हर दिन", "सुबह", "शाम को", "सोमवार को", "शनिवार को"),
        (
            "{n} {t} किताब पढ़ती है।",
            "{n} {t} एक गिलास पानी पीती है।",
            "{n} {t} चिट्ठी लिखती है।",
            "{n} {t} रोटी खरीदती है।",
            "{n} {t} बगीचे में काम करती है।",
            "{n} {t} स्टेशन पर इंतज़ार करती है।",
            "{n} {t} स्कूल जाती है।",
            "{n} {t} खिड़की खोलती है।",
            "{n} {t} सूप बनाती है।",
            "{n} {t} संगीत सुनती है।",
        ),
    ),
    "it": Language(
        ("Chiara", "Francesca", "Giulia", "Paola", "Silvia"),
        ("oggi", "ogni giorno", "di mattina", "di sera", "il lunedì", "il sabato"),
        (
            "{n} legge un libro {t}.",
            "{n} beve un bicchiere d'acqua {t}.",
            "{n} scrive una lettera {t}.",
            "{n} compra il pane {t}.",
            "{n} lavora in giardino {t}.",
            "{n} aspetta alla stazione {t}.",
            "{n} va a scuola {t}.",
            "{n} apre la finestra {t}.",
            "{n} cucina una zuppa {t}.",
            "{n} ascolta la musica {t}.",
        ),
    ),
    "ja": Language(
        ("花子", "由美", "恵子", "さくら", "直美"),
        ("今日", "毎日", "朝に", "夕方に", "月曜日に", "土曜日に"),
        (
            "{n}は{t}本を読みます。",
            "{n}は{t}水を飲みます。",
            "{n}は{t}手紙を書きます。",
            "{n}は{t}パンを買います。",
            "{n}は{t}庭で働きます。",
            "{n}は{t}駅で待ちます。",
            "{n}は{t}学校へ行きます。",
            "{n}は{t}窓を開けます。",
            "{n}は{t}スープを作ります。",
            "{n}は{t}音楽を聞きます。",
        ),
    ),
    "nl": Language(
        ("Femke", "Marijke", "Sanne", "Willemijn", "Anneke"),
        ("vandaag", "elke dag", "in de ochtend", "in de avond", "op maandag", "op zaterdag"),
        (
            "{n} leest {t} een boek.",
            "{n} drinkt {t} een glas water.",
            "{n} schrijft {t} een brief.",
            "{n} koopt {t} brood.",
            "{n} werkt {t} in de tuin.",
            "{n} wacht {t} op het station.",
            "{n} gaat {t} naar school.",
            "{n} opent {t} het raam.",
            "{n} kookt {t} soep.",
            "{n} luistert {t} naar muziek.",
        ),
    ),
    "pt": Language(
        ("Beatriz", "Inês", "Joana", "Luísa", "Teresa"),
        ("hoje", "todos os dias", "de manhã", "à noite", "na segunda-feira", "no sábado"),
        (
            "A {n} lê um livro {t}.",
            "A {n} bebe um copo de água {t}.",
            "A {n} escreve uma carta {t}.",
            "A {n} compra pão {t}.",
            "A {n} trabalha no jardim {t}.",
            "A {n} espera na estação {t}.",
            "A {n} vai à escola {t}.",
            "A {n} abre a janela {t}.",
            "A {n} cozinha uma sopa {t}.",
            "A {n} ouve música {t}.",
        ),
    ),
    "ru": Language(
        ("Анна", "Мария", "Ольга", "Татьяна", "Наталья"),
        ("сегодня", "каждый день", "утром", "вечером", "в понедельник", "в субботу"),
        (
            "{n} читает книгу {t}.",
            "{n} пьёт стакан воды {t}.",
            "{n} пишет письмо {t}.",
            "{n} покупает хлеб {t}.",
            "{n} работает в саду {t}.",
            "{n} ждёт на вокзале {t}.",
            "{n} спешит в школу {t}.",
            "{n} открывает окно {t}.",
            "{n} варит суп {t}.",
            "{n} слушает музыку {t}.",
        ),
    ),
    "sv": Language(
        ("Astrid", "Karin", "Linnea", "Maja", "Sigrid"),
        ("i dag", "varje dag", "på morgonen", "på kvällen", "på måndag", "på lördag"),
        (
            "{n} läser en bok {t}.",
            "{n} dricker ett glas vatten {t}.",
            "{n} skriver ett brev {t}.",
            "{n} köper bröd {t}.",
            "{n} arbetar i trädgården {t}.",
            "{n} väntar på stationen {t}.",
            "{n} går till skolan {t}.",
            "{n} öppnar fönstret {t}.",
            "{n} kokar soppa {t}.",
            "{n} lyssnar på musik {t}.",
        ),
    ),
    "tr": Language(
        ("Ayşe", "Elif", "Zeynep", "Fatma", "Emine"),
        ("bugün", "her gün", "sabahleyin", "akşamleyin", "pazartesi günü", "cumartesi günü"),
        (
            "{n} {t} bir kitap okuyor.",
            "{n} {t} bir bardak su içiyor.",
            "{n} {t} bir mektup yazıyor.",
            "{n} {t} ekmek alıyor.",
            "{n} {t} bahçede çalışıyor.",
            "{n} {t} istasyonda bekliyor.",
            "{n} {t} okula gidiyor.",
            "{n} {t} pencereyi açıyor.",
            "{n} {t} çorba pişiriyor.",
            "{n} {t} müzik dinliyor.",
        ),
    ),
    "zh": Language(
        ("小红", "李娜", "王芳", "张丽", "陈静"),
        ("今天", "每天", "早上", "晚上", "星期一", "星期六"),
        (
            "{n}{t}看书。",
            "{n}{t}喝一杯水。",
            "{n}{t}写一封信。",
            "{n}{t}买面包。",
            "{n}{t}在花园里工作。",
            "{n}{t}在车站等车。",
            "{n}{t}去学校。",
            "{n}{t}打开窗户。",
            "{n}{t}煮汤。",
            "{n}{t}听音乐。",
        ),
    ),
}
"""Language code (ISO 639-1) -> its sentences."""


def labelled_lines(seed: int = 0) -> dict[str, str]:
    """Each line of the file, in its order, with the code of its language."""
    rng = random.Random(f"multilingual/{seed}")
    lines: list[tuple[str, str]] = []
    for code, language in LANGUAGES.items():
        every = [s.format(n=n, t=t) for s in language.sentences for n in language.names for t in language.times]
        lines += [(line, code) for line in rng.sample(every, LINES_PER_LANGUAGE)]
    rng.shuffle(lines)
    return dict(lines)


@chz.chz(typecheck=True)
class CLIConfig(Seeded):
    """Where to write."""

    folder: str = chz.field(default=str(EXAMPLE_DATA), doc=f"folder of {FILE} and {LANGUAGES_FILE}, which are replaced")


def main(config: CLIConfig) -> None:
    known = labelled_lines(config.seed)
    for name, lines in ((FILE, known.keys()), (LANGUAGES_FILE, known.values())):
        write_text(Path(config.folder) / name, "".join(f"{line}\n" for line in lines))
    print(f"written to {config.folder}: {FILE}, {LANGUAGES_FILE}")


if __name__ == "__main__":
    run_recipe(CLIConfig, main)
